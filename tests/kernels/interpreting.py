"""What kernels need under Triton's interpreter besides. Processes set TRITON_INTERPRET before they
import this, since Triton reads it as it is imported.
"""

import torch
from torch import Tensor
from triton.runtime import interpreter

_PATCH_TENSORS = interpreter._patch_lang_tensor


def patch_tensors(tensor: type, scope: interpreter._LangPatchScope) -> None:
    """As Triton does, but bounds of loops are numbers under numpy 2.4 too."""
    _PATCH_TENSORS(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def apart(x: Tensor) -> Tensor:
    """A vector whose elements do not lie side by side, as a column of a matrix."""
    return torch.stack([x, torch.full_like(x, 1 << 20)], 1)[:, 0]


def shifted(x: Tensor) -> Tensor:
    """The same in memory that begins at no multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
