"""Packaging of fairseq_plugins; the versions it is developed with: requirements/development.txt."""

from setuptools import find_packages, setup

setup(
    name="fairseq_plugins",
    version="0.1.0",
    description="fairseq plugin: Transformer-XL, all-attention, product keys, Weighted Transformer",
    license="MIT",
    packages=find_packages(include=["fairseq_plugins", "fairseq_plugins.*"]),
    python_requires=">=3.10",
    install_requires=["numpy", "torch>=2.6"],
    # fairseq is an extra: several distributions provide it, and an installed one is kept.
    # fairseq-fixed and fastBPE are compiled against the torch and the Cython that are installed:
    # where pip finds no wheel of them, they take `pip install --no-build-isolation`.
    extras_require={
        # memories on a CPU go several times as slowly without it
        "fast": ["numba"],
        "fairseq": ["fairseq-fixed==0.12.3.1"],
        "translation": [
            "fastBPE",
            "num2words",
            "sacrebleu",
            "sacremoses",
            "sentencepiece",
            "subword-nmt",
        ],
        "faiss-cpu": ["faiss-cpu"],
        "faiss-gpu": ["faiss-gpu"],
        "import": ["google-crc32c", "safetensors"],
        "plots": ["matplotlib", "tensorboardX"],
    },
)
