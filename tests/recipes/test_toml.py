import pytest

from clipwise.errors import ConfigurationError
from clipwise.recipes import toml

CONTENT = {
    "run": {"name": 'a "quoted"\nname \x7f \\ ü', "seed": 3, "is": True, "not given": None},
    "encoding": {
        "kind": "table",
        "range": [0.1, -1e-30, float("inf")],
        "columns": {"age of person": {"kind": "number", "range": [0, 1]}, "città": {"categories": ["a", ""]}},
        "list": [{"x": 1, "y": "z"}, {}],
        "empty": {},
    },
}


def test_what_is_written_is_read_back(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(toml.text_of(CONTENT), encoding="utf-8")
    expected = {**CONTENT, "run": {k: v for k, v in CONTENT["run"].items() if v is not None}}
    assert toml.read(file) == expected


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        toml.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("x = [")
    with pytest.raises(ConfigurationError, match="not TOML"):
        toml.read(tmp_path / "bad.toml")
    with pytest.raises(ConfigurationError, match="set"):
        toml.text_of({"a": {"b": {1, 2}}})
