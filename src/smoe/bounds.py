"""Names, limits and default values of settings that several modules use."""

from __future__ import annotations

MOST_THREADS = 1024
"""The largest number of computing threads. The largest machines have fewer cores, and torch ends the process if it
cannot start its threads."""
MOST_IO_THREADS = 64
"""The largest number of threads that read files; two saturate a disk."""
MOST_PREFETCH_DEPTH = 16
"""The largest number of later layers to predict; the papers use up to three."""
DEFAULT_PREFETCH_DEPTH = 2
MOST_CORRECTED_LAYERS = 4
"""The number of later layers for which corrections are learned (predictor `corrected-gates`)."""
DEFAULT_DRAFT = "int4"
"""The default precision of the draft model."""
DEPARTURE = ("at-once", "late")
"""When the draft model begins the next token. at-once: from its own prediction of the token; late: when the model has
sampled the token."""
MOST_DRAFT_EXTRA = 64
EMULATED = "emulated"
"""The name of the device that is emulated on the CPU (`memory/emulation.py`)."""
DTYPES = ("auto", "bfloat16", "float16", "float32")
DIRECT_IO = ("auto", "on", "off")
ONCE, ALWAYS = "once", "always"
"""When a model's kernels and experts are tested (`EngineConfig.self_test`)."""
KERNELS = ("auto", "native", "own-order", "torch")
PRECISION = ("auto", "int8", "int4", "int3", "int2")
LOW_PRECISION = ("none", *PRECISION[1:])
AUTO, INT8, AS_DTYPE = ACTIVATIONS = ("auto", "int8", "dtype")
"""Values of the setting `activations`."""
BF16 = "bf16"
"""The type of activation rows that are not rounded, in names of kernels; see `INT8`."""
