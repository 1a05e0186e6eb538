"""Each extra of pyproject.toml, installed alone: `python -m tests.extras [EXTRA ...] [--lowest]`.

Every extra gets an environment with torch, the required packages, and what pip installs for `clipwise-dp[EXTRA]`. A
short program then uses the module that the extra is for. torch and the required packages lie in one environment, which
the others fall back to.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "extras"
DEVELOPMENT = "dev"

COMMON = """
import logging, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import clipwise
assert "src" not in clipwise.__file__.split("/"), clipwise.__file__
data = TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = {"batch_size": 8, "noise_multiplier": 1.0}
def train(private):
    for x, y in private.loader:
        private.step(F.cross_entropy(model(x), y, reduction="none") if len(x) else None)
"""

VERSIONS = """
import sys
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in sys.argv[1:]))
"""

USES = {
    "": """
        private = clipwise.make_private(model, optimizer, data, **options)
        train(private)
        print(private.statement())
    """,
    "plots": """
        from clipwise.report import plots
        ledger = clipwise.MemoryLedger()
        train(clipwise.make_private(model, optimizer, data, **options, ledger=ledger))
        plots.epsilon_over_steps(ledger.history(), 1e-5, "epsilon.png")
    """,
    "tables": """
        from pathlib import Path
        import pyarrow, pyarrow.parquet
        from clipwise.recipes.tables.read import read_table
        pyarrow.parquet.write_table(pyarrow.table({"x": [1.5, 2.5], "y": ["a", "b"]}), "data.parquet")
        assert list(read_table(Path("data.parquet")).columns) == ["x", "y"]
    """,
    "images": """
        from pathlib import Path
        import numpy
        from PIL import Image
        from clipwise.recipes.images.pixels import FolderImages
        for name in "ab":
            (Path("images") / name).mkdir(parents=True)
            Image.fromarray(numpy.zeros((9, 9, 3), numpy.uint8)).save(f"images/{name}/1.png")
        assert FolderImages(Path("images")).pixels(numpy.arange(2), 3, 8).shape == (2, 3, 8, 8)
    """,
    "text": """
        from clipwise.recipes.texts import sentences
        assert sentences.embedded(["one text", "another"]).shape == (2, sentences.SIZE)
    """,
    "export": """
        from pathlib import Path
        import onnx
        from clipwise.recipes.export import _onnx
        _onnx(model.eval(), (data.tensors[0],), Path("model.onnx"))
        onnx.checker.check_model("model.onnx")
    """,
    "tune": """
        from pathlib import Path
        from clipwise.tune import Range, study
        from clipwise.tune.subject import Score, Subject
        subject = Subject("toy", {"x": Range(0, 1)}, lambda s: Score(s["x"], 1.0, 1e-5, (1.0, 0.1, 10)))
        assert len(study.search(subject, 3, Path("."), print)) == 3
    """,
    "secure": """
        train(clipwise.make_private(model, optimizer, data, **options, noise="secure"))
    """,
    "hf": """
        from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        from clipwise.integrations.huggingface import PrivacyArguments, PrivateTrainer
        config = BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
        mask = torch.ones(5).long()
        rows = [{"input_ids": torch.arange(5), "attention_mask": mask, "labels": i % 2} for i in range(24)]
        arguments = TrainingArguments("run", report_to=[], use_cpu=True, num_train_epochs=1, save_strategy="no")
        trainer = PrivateTrainer(
            BertForSequenceClassification(config), arguments, train_dataset=rows,
            privacy=PrivacyArguments(noise_multiplier=1.0),
        )
        trainer.train()
        trainer.private.statement()
    """,
    "peft": """
        import peft
        from clipwise.integrations.adapters import ParametersMoved, require_trainable
        model = peft.get_peft_model(torch.nn.Sequential(model), peft.LoraConfig(r=2, target_modules=["0"]))
        require_trainable(model)
        moved = ParametersMoved(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        train(clipwise.make_private(model, optimizer, data, **options))
        assert not moved.unchanged()
    """,
    "accelerate": """
        from accelerate import Accelerator
        from clipwise.integrations.accelerate import make_private
        accelerator = Accelerator(cpu=True)
        loader = make_private(accelerator, model, optimizer, DataLoader(data, 8), noise_multiplier=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        loader.private.statement()
    """,
    "lightning": """
        import lightning.pytorch as pl
        from clipwise.integrations.lightning import PrivateStrategy
        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = model
            def training_step(self, batch, index):
                return F.cross_entropy(self.net(batch[0]), batch[1])
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)
        strategy = PrivateStrategy(noise_multiplier=1.0)
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, strategy=strategy, logger=False)
        trainer.fit(Module(), DataLoader(data, 8))
        strategy.private.statement()
    """,
    "logging": """
        from clipwise.integrations.logging import RunLogger, TensorBoardLog, progress
        private = clipwise.make_private(model, optimizer, data, **options)
        with RunLogger(private, TensorBoardLog("logs")) as log:
            for x, y in progress(private, epochs=1, bar="tqdm"):
                private.step(F.cross_entropy(model(x), y, reduction="none") if len(x) else None)
                log.step()
    """,
    "sklearn": """
        from clipwise.integrations.sklearn import PrivateClassifier
        X, y = data.tensors[0].numpy(), data.tensors[1].numpy()
        fitted = PrivateClassifier(epsilon=3.0, delta=1e-2, classes=[0, 1], feature_range=(-3, 3)).fit(X, y)
        assert fitted.predict_proba(X).shape == (24, 2)
    """,
    "flower": """
        from clipwise.integrations.flower import PrivateFedAvg
        PrivateFedAvg(model, clients=10, sample_rate=0.5, max_norm=0.5, epsilon=5.0, delta=1e-3)
    """,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", help="all without one; '' installs none")
    parser.add_argument("--lowest", action="store_true", help="the lowest versions that pyproject.toml allows")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": [], **project["optional-dependencies"]}
    del extras[DEVELOPMENT]
    base = made_base(project["dependencies"])
    wheel = made_wheel(base)
    failed = 0
    print(f"{'extra':<12} {'ok':<4} versions", flush=True)
    for name in arguments.extras or extras:
        required = [Requirement(text) for text in extras[name]]
        versions, problem = tried(name, required, base, wheel, arguments.lowest)
        failed += bool(problem)
        print(f"{name or '(none)':<12} {'no' if problem else 'yes':<4} {versions}", flush=True)
        if problem:
            print(textwrap.indent(problem, "    "), flush=True)
    return int(failed > 0)


def tried(
    name: str, required: Sequence[Requirement], base: Path, wheel: Path, is_lowest: bool
) -> tuple[str, str | None]:
    """The versions that an extra installs, and the problem with them."""
    if name not in USES:
        return "", f"USES in tests/extras.py has no program for {name!r}: add one."
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        try:
            python = made_environment(Path(folder) / "environment", base)
            limits = Path(folder) / "lowest.txt"
            limits.write_text("".join(f"{r.name}=={lowest(r, base)}\n" for r in required) if is_lowest else "")
            target = f"clipwise-dp[{name}] @ {wheel.as_uri()}" if name else wheel.as_uri()
            run(python, "-m", "pip", "install", "-q", "-c", str(limits), target)
            versions = run(python, "-c", VERSIONS, "clipwise-dp", "torch", "numpy", *(r.name for r in required)).strip()
        except subprocess.CalledProcessError as error:
            return "", f"{error.stdout}{error.stderr}"[-2000:]
        try:
            run(python, "-c", COMMON + textwrap.dedent(USES[name]), cwd=Path(folder))
        except subprocess.CalledProcessError as error:
            return versions, error.stderr[-2000:]
    return versions, None


def made_base(required: Sequence[str]) -> Path:
    """An environment with torch and the required packages."""
    base = WORK / "base"
    python = base / "bin" / "python"
    stamp = base / "installed.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(required):
        shutil.rmtree(base, ignore_errors=True)
        run(Path(sys.executable), "-m", "venv", str(base))
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), "torch")
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *required)
        stamp.write_text("\n".join(required))
    return python


def made_wheel(python: Path) -> Path:
    """The wheel of this tree."""
    folder = WORK / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    source = folder / "source"  # a copy, because setuptools leaves files where it builds
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    return wheel


def made_environment(folder: Path, base: Path) -> Path:
    """An environment that falls back to the packages of another one."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    run(base, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    link = f"import site; site.addsitedir({run(base, '-c', where).strip()!r})\n"
    (Path(run(python, "-c", where).strip()) / "base.pth").write_text(link)
    return python


def lowest(required: Requirement, python: Path) -> Version:
    """The lowest version in the index that a requirement allows."""
    listed = run(python, "-m", "pip", "index", "versions", required.name)
    found = re.search(r"Available versions: (.*)", listed)
    assert found is not None, listed
    return min(v for v in map(Version, found[1].split(", ")) if v in required.specifier)


def run(python: Path, *arguments: str, cwd: Path = ROOT) -> str:
    return subprocess.run([python, *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
