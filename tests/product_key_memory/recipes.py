"""The command files of product-key memory, and what they take."""

# layers and width; the layers with a memory, by the number of memories
PRODUCT_KEY_MEMORY = {
    f"product_key_memory/{layers}l_{width}d": (layers, width, places)
    for layers, places in [
        (12, ["", "6", "4,8", "3,6,9"]),
        (16, ["", "8", "6,12", "4,8,12"]),
        (24, ["", "12", "8,16", "6,12,18"]),
    ]
    for width in (1024, 1600)
}
# names of the arguments of train after CHECKPOINTS, and an example of them
ARGUMENTS = {
    **dict.fromkeys(PRODUCT_KEY_MEMORY, ("MEMORIES", "2")),
    "product_key_memory/ablation_size": ("SLOTS", "262k"),
    "product_key_memory/ablation_position": ("LAYER", "5"),
    "product_key_memory/ablation_heads": ("HEADS KNN", "4 32"),
    "product_key_memory/ablation_keys": ("SLOTS KEYS", "262k product"),
    "product_key_memory/english": ("SLOTS", "16k"),
}
