"""Checks and options for models with adapters of PEFT. They work in every loop and need no import of PEFT.

An adapter that is frozen, disabled or merged is not trained, and the losses do not show it. Noise moves every
parameter that a run trains, so a parameter that kept its exact value got no release.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from torch import nn

from clipwise.errors import ConfigurationError, PrivacyWarning
from clipwise.validation.inventory import checksums

_NAMED = 4  # in messages
_A, _B = ("lora_A", "lora_embedding_A"), ("lora_B", "lora_embedding_B")


def require_trainable(model: nn.Module) -> None:
    """Raise if an active adapter of the model would not be trained.

    Raises:
        ConfigurationError: with the names of layers whose adapter is disabled, merged or completely frozen, and for
            AdaLoRA.
    """
    for config in getattr(model, "peft_config", {}).values():
        if str(getattr(config.peft_type, "value", config.peft_type)) == "ADALORA":
            raise ConfigurationError(
                "AdaLoraConfig adds a penalty on the adapters to the loss, which then is no mean over records: use "
                "LoraConfig."
            )
    advice = {
        "disabled": "call model.enable_adapter_layers(), and leave model.disable_adapter() before the training",
        "merged": "call model.unmerge_adapter() before the training",
        "frozen": "load it with PeftModel.from_pretrained(..., is_trainable=True), or call model.set_adapter(name)",
    }
    found: dict[str, list[str]] = {state: [] for state in advice}
    for name, module in model.named_modules():
        if not (hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters")):
            continue
        if module.disable_adapters:
            found["disabled"].append(name)
        elif getattr(module, "merged", False):  # `modules_to_save`, such as a new head, is never merged
            found["merged"].append(name)
        elif (own := list(_active_parameters(module))) and not any(p.requires_grad for p in own):
            found["frozen"].append(name)
    for state, names in found.items():
        if names:
            raise ConfigurationError(
                f"The adapter of {_listed(names)} is {state} and would not train: {advice[state]}."
            )


class ParametersMoved:
    """Finds trainable parameters that a training did not move.

        moved = ParametersMoved(model)
        ...  # the training
        moved.warn_of_unchanged()

    Args:
        model: before the training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._before = self._now()

    def unchanged(self) -> list[str]:
        """The names of the parameters that have exactly the values that they had before."""
        return [name for name, a, b in zip(self._parameters, self._before, self._now(), strict=True) if a == b]

    def warn_of_unchanged(self) -> None:
        """Warn with the names of the parameters that did not move."""
        if names := self.unchanged():
            warnings.warn(
                f"{_listed(names)} did not change during the training, although every release moves all parameters "
                "that are trained. Is the learning rate of its group 0, was it frozen after the run began, or were "
                "its values restored?",
                PrivacyWarning,
                stacklevel=2,
            )

    def _now(self) -> list[int]:
        return list(map(int, checksums(self._parameters.values()).tolist()))


def train_lora_parts(model: nn.Module, *, a: bool, b: bool) -> None:
    """Choose which factors of B A the LoRA adapters train. Call it before the optimizer and the run are made.

    The noise of both factors enters their product, and A multiplies the noise of B. With A frozen the update is linear
    in B, so it is a noised gradient step on the product. A alone trains only where B is not 0, so a new adapter begins
    with B.

    Args:
        model: with LoRA or DoRA adapters.
        a, b: whether the factor A, and the factor B, is trained.
    """
    if not (a or b):
        raise ConfigurationError("a and b are both False: the adapters would not train.")
    count = 0
    for name, parameter in model.named_parameters():
        parts = set(name.split("."))
        for factor, is_trained in ((_A, a), (_B, b)):
            if parts.intersection(factor):
                parameter.requires_grad_(is_trained)
                count += 1
    if not count:
        raise ConfigurationError("The model has no LoRA adapters: call peft.get_peft_model with a LoraConfig first.")


def _active_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of the active adapters of a layer."""
    for kind in module.adapter_layer_names:  # type: ignore[union-attr]
        held = getattr(module, str(kind), {})
        for adapter in module.active_adapters:  # type: ignore[union-attr]
            if adapter not in held:
                continue
            member = held[adapter]
            if isinstance(member, nn.Parameter):
                yield member
            elif isinstance(member, nn.Module):
                yield from member.parameters()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")
