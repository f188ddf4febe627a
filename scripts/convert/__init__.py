"""Commands that convert models of other code and average checkpoints."""

SOURCES = TRANSFORMER_XL, TENSORFLOW, ADAPTIVE_SPAN, HUGGING_FACE = (
    "transformer-xl",
    "transformer-xl-tensorflow",
    "adaptive-span",
    "huggingface-transfo-xl",
)
