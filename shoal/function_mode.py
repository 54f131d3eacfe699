"""Torch function modes that end in any order."""

from __future__ import annotations

from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


class UnorderedFunctionMode(TorchFunctionMode):
    """A mode that takes itself off torch's stack, where ``TorchFunctionMode`` takes off the innermost one."""

    def stop(self) -> None:
        """Leave the stack. Idempotent."""
        if self in (modes := _get_current_function_mode_stack()):
            for _ in modes:
                _pop_torch_function_stack()
            for mode in modes:
                if mode is not self:
                    _push_on_torch_function_stack(mode)

    def __exit__(self, *_: object) -> None:
        self.stop()
