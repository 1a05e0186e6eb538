"""A run as a record of the OpenDP Deployments Registry, tier 3.

The fields and their nesting are those of the registry's schema (github.com/opendp/deployments-registry-data), as JSON,
which is also YAML. Fields that the run does not record are marked `TO_FILL_IN`.
"""

from __future__ import annotations

from typing import Any

from clipwise.errors import ConfigurationError
from clipwise.ledger.run_description import plain
from clipwise.privacy import Adjacency
from clipwise.report import plain_words as words
from clipwise.report import wording
from clipwise.report.record import RunRecord
from clipwise.report.run_statement import assumptions, model_of, software

TO_FILL_IN = "to be filled in by "
CURATOR, AUTHOR = f"{TO_FILL_IN}the data curator", f"{TO_FILL_IN}the author of the entry"
REPOSITORY = "https://pypi.org/project/clipwise-dp/"

_DISTANCE = {
    Adjacency.ZERO_OUT: "number of {unit}s that are replaced by an empty one",
    Adjacency.ADD_REMOVE: "number of {unit}s that are added or removed",
    Adjacency.REPLACE_ONE: "number of {unit}s that differ, at equal size (Hamming distance)",
}


def registry(record: RunRecord) -> dict[str, Any]:
    """The entry of a run, in JSON types. A run without guarantee has none."""
    if record.no_guarantee is not None:
        raise ConfigurationError(f"{record.path} cannot be registered: {record.no_guarantee}")
    content = {
        "url_slug": record.name,
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "product": _product(record),
            "dp_flavor": _flavor(record),
            "privacy_loss": _loss(record),
            "model": _model(),
            "accounting": {"post_processing": words.POST_PROCESSING, "composition": _composition(record)},
            "implementation": _implementation(record),
            "resources": {"sources": f"- Software: {REPOSITORY}", "registry_authors": [AUTHOR]},
        },
    }
    result: dict[str, Any] = plain(content)
    return result


def _product(record: RunRecord) -> dict[str, Any]:
    description = record.section("data").get("description")
    trained_on = f" Trained on: {description}." if description else ""
    return {
        "name": record.name,
        "data_curators": [CURATOR],
        "intended_use": CURATOR,
        "data_product_type": "Machine learning model",
        "data_product_region": CURATOR,
        "data_product_sector": CURATOR,
        "description": f"Machine learning model ({model_of(record) or 'PyTorch'}).{trained_on}",
        "publication_date": CURATOR,
    }


def _flavor(record: RunRecord) -> dict[str, Any]:
    s, data = record.ledgers[0].spent, record.section("data")
    rows = record.dataset_size
    size = "" if rows is None else f" with exactly {rows} rows"
    unprotected = [f"the number of {s.unit}s"] if s.adjacency is not Adjacency.ADD_REMOVE else []
    unprotected.append("all settings of the run (config.toml), and the row numbers of the held-out rows")
    return {
        "name": "Approximate DP",
        "input_metric": _DISTANCE[s.adjacency].format(unit=s.unit),
        "bound_on_input_distance": 1,
        "output_measure": "smoothed max divergence, (epsilon, delta)",
        "bound_on_output_distance": {"epsilon": record.epsilon, "delta": record.delta},
        "data_domain": f"all data sets{size} of this form: {data.get('description') or CURATOR}",
        "unprotected_quantities": "; ".join(unprotected),
    }


def _loss(record: RunRecord) -> dict[str, Any]:
    s = record.ledgers[0].spent
    return {
        "privacy_unit": str(s.unit),
        "privacy_unit_description": (
            f"Adjacent data sets: {wording.neighbours(s.adjacency, s.unit)}. How {s.unit}s relate to persons: {CURATOR}"
        ),
        "privacy_parameters": {"epsilon": record.epsilon, "delta": record.delta},
        "privacy_parameters_description": (
            f"{words.detection(record)} Gaussian differential privacy with mu {words.figure(record.risks.mu, 3)}, up "
            f"to delta. Planned future releases of these data: {CURATOR}"
        ),
    }


def _model() -> dict[str, Any]:
    return {
        "model_name": "Central",
        "model_name_description": wording.SETTING,
        "actors": (
            "The party that trains holds the data, the noise key and the sampled batches, and is trusted with them. "
            "Parties that see the model or a released figure are not trusted and may know all other data. Names and "
            f"access rights: {CURATOR}"
        ),
        "release_type": "One release",
        "release_type_description": f"The model and figures of one run. Further releases of the same data: {CURATOR}",
        "data_source_type": "Static",
        "access_type": "Non-interactive",
        "access_type_description": "The private data are read during training and evaluation only.",
    }


def _composition(record: RunRecord) -> str:
    parts = [f"{name}: {text}" for found in record.ledgers[:1] for name, text in found.lines() if name == "accountant"]
    return " ".join([words.composition(record), *parts])


def _implementation(record: RunRecord) -> dict[str, Any]:
    preparation = "; ".join(record.preprocessing) or f"not recorded: {CURATOR}"
    share = record.section("privacy").get("counts_share")
    counted = "Noised counts of the preparation are in the ledger. " if share else ""
    return {
        "pre_processing_eda_hyperparameter_tuning": (
            f"Preparation: {preparation}. {counted}Hyper-parameter search: not accounted in this run. Exploratory "
            f"analysis and earlier runs on these data: {CURATOR}"
        ),
        "mechanisms": " ".join(_mechanisms(record)),
        "justification": f"Assumptions: {'; '.join(assumptions(record))}. Choice of epsilon, delta and unit: {CURATOR}",
    }


def _mechanisms(record: RunRecord) -> list[str]:
    shown = ("releases", "noise", "sensitivity")
    lines = [f"{name}: {text}." for found in record.ledgers for name, text in found.lines() if name in shown]
    versions = map(wording.listed, software(record))
    lines += [f"Implemented with clipwise, {REPOSITORY} ({'; '.join(versions) or 'versions not recorded'})."]
    return [*lines, f"Security of the underlying data and access controls: {CURATOR}"]
