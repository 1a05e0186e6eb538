"""Unusable files and folders are refused before any work, by an error that names the option."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from clipwise.cli.app import app
from clipwise.cli.output import require_picture
from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import require_folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "a_file"
    made.write_text("something")
    return made


def test_a_plot_needs_a_known_format(tmp_path: Path) -> None:
    require_picture(None)
    require_picture(tmp_path / "curve.PNG")
    with pytest.raises(ConfigurationError, match=r"--plot .*curve\.txt is not possible: .* \.png or \.svg"):
        require_picture(tmp_path / "curve.txt")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigurationError, match=r"--plot: .*it is a folder"):
        require_picture(tmp_path / "folder.svg")


def test_a_folder_may_be_new_and_must_not_be_a_file(tmp_path: Path, file: Path) -> None:
    require_folder(tmp_path)
    require_folder(tmp_path / "new" / "newer")
    for out in (file, file / "below"):
        with pytest.raises(ConfigurationError, match=r"--out: .*a_file.* cannot be written"):
            require_folder(out)


def test_a_folder_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", forbidden)  # root would be allowed to write
    with pytest.raises(ConfigurationError, match=r"--out: .* cannot be written .*Permission denied"):
        require_folder(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused_whatever_the_permissions(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--out: .* cannot be written .*File name too long"):
        require_folder(tmp_path / "new" / ("long" * 100))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"--out: .* cannot be written"):
        require_folder(tmp_path / "link")


on_linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")


PLANNED = ("--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("epsilon", *PLANNED, "--plot", "curve.txt"), "--plot curve.txt is not possible"),
        (("tradeoff", *PLANNED, "--plot", "FILE/curve.png"), "cannot be written"),
        (("noise", "--epsilon", 3, *PLANNED[2:], "--plot", "curve"), "--plot curve is not possible"),
        (("tune", "digits", "--out", "FILE"), "cannot be written"),
        (("tune", "digits", "--accounted", "--out", "FILE"), "cannot be written"),
        pytest.param(("tune", "digits", "--out", "/proc/x"), "--out: /proc/x cannot be written", marks=on_linux),
    ],
)
def test_commands_check_paths_first(arguments: tuple[object, ...], message: str, file: Path) -> None:
    words = [str(word).replace("FILE", str(file)) for word in arguments]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2 and message in found.output.replace("\n", " "), found.output
