"""What fairseq's options of Adam say."""

from typing import Any


def adam_options(cfg: Any) -> dict[str, Any]:
    """Return lr, betas, eps and weight_decay of options that fairseq's ``adam`` has too."""
    betas = cfg.adam_betas
    if isinstance(betas, str):
        betas = (float(beta) for beta in betas.strip("()[] ").split(","))
    return {
        "lr": cfg.lr[0],
        "betas": tuple(betas),
        "eps": cfg.adam_eps,
        "weight_decay": cfg.weight_decay,
    }
