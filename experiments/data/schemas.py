"""Public schemas of seven tables: columns, ranges and levels that do not depend on the records.

Levels are those in the publishers' descriptions. Ranges are round numbers for what a column measures. For private
records they must be fixed before looking at the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clipwise.validation.arguments import one_of
from experiments.data.encoding import Column, Flag, Levels, Number


@dataclass(frozen=True)
class Schema:
    """One table.

    Attributes:
        title: its name in results.
        files: the names of its files, without extensions.
        label: the column to predict.
        classes: the values of the label, in the order of their numbers.
        columns: the encoding of each column.
        others: the encoding of other columns; None leaves them out.
        note: a remark for readers of results.
    """

    title: str
    files: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    columns: Mapping[str, Column] = field(default_factory=dict)
    others: Column | None = None
    note: str = ""


def schema(name: str) -> Schema:
    """The schema of a table by name."""
    one_of("data", name, SCHEMAS)
    return SCHEMAS[name]


def _levels(words: str) -> Levels:
    return Levels(tuple(words.split()))


def _numbers(low: int, high: int) -> Levels:
    return Levels(tuple(str(i) for i in range(low, high + 1)))


_ADULT: dict[str, Column] = {
    "age": Number(17, 90),
    "workclass": _levels(
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked ?"
    ),
    "fnlwgt": Number(1e4, 1.5e6, logarithmic=True),
    "education": _levels(
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters 1st-4th 10th "
        "Doctorate 5th-6th Preschool"
    ),
    "education-num": Number(1, 16),
    "marital-status": _levels(
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse"
    ),
    "occupation": _levels(
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
        "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces ?"
    ),
    "relationship": _levels("Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    "race": _levels("White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    "sex": _levels("Female Male"),
    "capital-gain": Number(0, 1e5, logarithmic=True),
    "capital-loss": Number(0, 5e3, logarithmic=True),
    "hours-per-week": Number(0, 100),
    # Of 41 countries those that are not a handful of records anywhere; all others are 0.
    "native-country": _levels("United-States Mexico Philippines Germany Canada India Puerto-Rico ?"),
}

# Radius and texture in pixels and grey levels; areas, and the spread ("error") and largest ("worst") of each measure.
_SHAPE: dict[str, tuple[float, float]] = {
    "radius": (5, 30),
    "texture": (8, 40),
    "perimeter": (40, 200),
    "area": (100, 2500),
    "smoothness": (0.05, 0.17),
    "compactness": (0.01, 0.4),
    "concavity": (0.0, 0.5),
    "concave_points": (0.0, 0.2),
    "symmetry": (0.1, 0.3),
    "fractal_dimension": (0.04, 0.1),
}
_SPREAD: dict[str, tuple[float, float]] = {
    "radius": (0.1, 3),
    "texture": (0.3, 5),
    "perimeter": (0.5, 25),
    "area": (5, 500),
    "smoothness": (0.001, 0.03),
    "compactness": (0.002, 0.15),
    "concavity": (0.001, 0.4),
    "concave_points": (0.001, 0.05),
    "symmetry": (0.005, 0.08),
    "fractal_dimension": (0.0005, 0.03),
}
_WORST: dict[str, tuple[float, float]] = {
    "radius": (5, 40),
    "texture": (10, 50),
    "perimeter": (40, 260),
    "area": (100, 4500),
    "smoothness": (0.05, 0.25),
    "compactness": (0.02, 1.1),
    "concavity": (0.0, 1.3),
    "concave_points": (0.0, 0.3),
    "symmetry": (0.15, 0.7),
    "fractal_dimension": (0.05, 0.2),
}


def _breast() -> dict[str, Column]:
    found: dict[str, Column] = {}
    for name, (low, high) in _SHAPE.items():
        found[f"mean_{name}"] = Number(low, high, logarithmic=name == "area")
        least, most = _SPREAD[name]
        found[f"{name}_error"] = Number(least, most, logarithmic=True, unit=least)
        worst = _WORST[name]
        found[f"worst_{name}"] = Number(*worst, logarithmic=name == "area")
    return found


_MONTHS = range(1, 7)
_CREDIT: dict[str, Column] = {
    "LIMIT_BAL": Number(1e4, 1e6, logarithmic=True),
    "SEX": _numbers(1, 2),
    "EDUCATION": _numbers(0, 6),
    "MARRIAGE": _numbers(0, 3),
    "AGE": Number(20, 80),
    **{f"PAY_{month}": Levels(tuple(map(str, range(-2, 9)))) for month in (0, 2, 3, 4, 5, 6)},
    **{f"BILL_AMT{month}": Number(-1e6, 1e6, logarithmic=True, unit=1e3) for month in _MONTHS},
    **{f"PAY_AMT{month}": Number(0, 1e6, logarithmic=True, unit=1e2) for month in _MONTHS},
}

_GERMAN: dict[str, Column] = {
    "checking_status": _levels("A11 A12 A13 A14"),
    "duration": Number(0, 72),
    "credit_history": _levels("A30 A31 A32 A33 A34"),
    "purpose": _levels("A40 A41 A42 A43 A44 A45 A46 A47 A48 A49 A410"),
    "credit_amount": Number(250, 2e4, logarithmic=True),
    "savings": _levels("A61 A62 A63 A64 A65"),
    "employment": _levels("A71 A72 A73 A74 A75"),
    "installment_rate": Number(1, 4),
    "personal_status_sex": _levels("A91 A92 A93 A94 A95"),
    "other_debtors": _levels("A101 A102 A103"),
    "residence_since": Number(1, 4),
    "property": _levels("A121 A122 A123 A124"),
    "age": Number(18, 80),
    "other_installment_plans": _levels("A141 A142 A143"),
    "housing": _levels("A151 A152 A153"),
    "existing_credits": Number(1, 4),
    "job": _levels("A171 A172 A173 A174"),
    "num_liable": Number(1, 2),
    "telephone": _levels("A191 A192"),
    "foreign_worker": _levels("A201 A202"),
}

_NURSERY: dict[str, Column] = {
    "parents": _levels("usual pretentious great_pret"),
    "has_nurs": _levels("proper less_proper improper critical very_crit"),
    "form": _levels("complete completed incomplete foster"),
    "children": _levels("1 2 3 more"),
    "housing": _levels("convenient less_conv critical"),
    "finance": _levels("convenient inconv"),
    "social": _levels("nonprob slightly_prob problematic"),
    "health": _levels("recommended priority not_recom"),
}

_SCHOOLING = _levels("1 2 3 4 5 19 34 37 38")  # from secondary school to a doctorate, basic schooling, unknown
_WORK = _levels("0 1 2 3 4 5 6 7 8 9 10 90 99")  # the main groups of the list of occupations
_STUDENTS: dict[str, Column] = {
    "Marital status": _numbers(1, 6),
    "Application mode": _levels("1 2 5 7 10 15 16 17 18 26 27 39 42 43 44 51 53 57"),
    "Application order": Number(0, 9),
    "Course": _levels("33 171 8014 9003 9070 9085 9119 9130 9147 9238 9254 9500 9556 9670 9773 9853 9991"),
    "Daytime/evening attendance": Flag(),
    "Previous qualification": _levels("1 2 3 4 5 6 9 10 12 14 15 19 38 39 40 42 43"),
    "Previous qualification (grade)": Number(80, 200),
    "Nacionality": _levels("1"),  # Portuguese or not: the others are few each
    "Mother's qualification": _SCHOOLING,
    "Father's qualification": _SCHOOLING,
    "Mother's occupation": _WORK,
    "Father's occupation": _WORK,
    "Admission grade": Number(80, 200),
    **{
        name: Flag()
        for name in (
            "Displaced",
            "Educational special needs",
            "Debtor",
            "Tuition fees up to date",
            "Gender",
            "Scholarship holder",
            "International",
        )
    },
    "Age at enrollment": Number(17, 70, logarithmic=True, unit=10),
    **{
        f"Curricular units {semester} sem ({what})": Number(0, most)
        for semester in ("1st", "2nd")
        for what, most in (
            ("credited", 20),
            ("enrolled", 20),
            ("evaluations", 30),
            ("approved", 15),
            ("grade", 20),
            ("without evaluations", 10),
        )
    },
    "Unemployment rate": Number(5, 20),
    "Inflation rate": Number(-2, 5),
    "GDP": Number(-5, 5),
}

SCHEMAS: dict[str, Schema] = {
    "adult": Schema("Adult Income", ("adult_train", "adult_test"), "income", ("<=50K", ">50K"), _ADULT),
    "naticusdroid": Schema(
        "Android",
        ("naticusdroid_train",),
        "Result",
        ("0", "1"),
        others=Flag(),
        note="partial: 20,531 of 29,332 records, since the rest has no label in this copy",
    ),
    "breast_cancer": Schema("Breast Cancer", ("breast_cancer",), "benign", ("0", "1"), _breast()),
    "credit_default": Schema("Default Credit", ("credit_default",), "default_payment_next_month", ("0", "1"), _CREDIT),
    "students_dropout": Schema(
        "Dropout", ("students_dropout",), "Target", ("Dropout", "Enrolled", "Graduate"), _STUDENTS
    ),
    "german_credit": Schema("German Credit", ("german_credit",), "class", ("1", "2"), _GERMAN),
    "nursery": Schema(
        "Nursery", ("nursery",), "class", ("not_recom", "recommend", "very_recom", "priority", "spec_prior"), _NURSERY
    ),
}
