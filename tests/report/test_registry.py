"""The entry for the OpenDP Deployments Registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipwise.errors import ConfigurationError
from clipwise.report.record import RunRecord
from clipwise.report.registry import TO_FILL_IN, registry

# The fields of tier 3.
FIELDS = {
    "product": {"name", "data_curators", "intended_use", "data_product_type", "description", "publication_date"},
    "dp_flavor": {"name", "input_metric", "output_measure", "data_domain", "unprotected_quantities"},
    "privacy_loss": {"privacy_unit", "privacy_unit_description", "privacy_parameters"},
    "model": {"model_name", "actors", "release_type", "data_source_type", "access_type"},
    "accounting": {"post_processing", "composition"},
    "implementation": {"pre_processing_eda_hyperparameter_tuning", "mechanisms", "justification"},
    "resources": {"sources", "registry_authors"},
}


def test_it_has_the_fields_of_tier_3(record: RunRecord) -> None:
    entry = json.loads(json.dumps(registry(record), allow_nan=False))
    assert entry["tier"] == 3 and set(entry["deployment"]) == set(FIELDS)
    for name, fields in FIELDS.items():
        assert fields <= set(entry["deployment"][name]), name


def test_it_states_what_the_run_recorded(record: RunRecord) -> None:
    found = registry(record)["deployment"]
    assert found["privacy_loss"]["privacy_parameters"] == {"epsilon": record.epsilon, "delta": 1e-5}
    assert found["privacy_loss"]["privacy_unit"] == "record" and found["dp_flavor"]["name"] == "Approximate DP"
    assert "exactly 50 rows" in found["dp_flavor"]["data_domain"]
    assert "parallel composition" in found["accounting"]["composition"]
    assert "noise multiplier 1.6" in found["implementation"]["mechanisms"]
    assert "not accounted" in found["implementation"]["pre_processing_eda_hyperparameter_tuning"]


def test_fields_for_the_publisher_are_marked(record: RunRecord) -> None:
    found = registry(record)["deployment"]
    for text in (found["product"]["intended_use"], found["model"]["actors"], found["implementation"]["justification"]):
        assert TO_FILL_IN in text


def test_a_run_without_guarantee_has_no_entry(seeded: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be registered"):
        registry(RunRecord.read(seeded))
