"""How large the tensors are that a computation holds."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Records how many numbers each operation's new results take: views take none."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def storages(tree):
            tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
            dense = [
                p for t in tensors for p in ((t._indices(), t._values()) if t.is_sparse else (t,))
            ]
            return {p.untyped_storage().data_ptr(): p for p in dense if p.numel()}

        out = func(*args, **(kwargs or {}))
        known = storages([args, kwargs])
        for address, tensor in storages(out).items():
            if address not in known:
                self.sizes.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return out
