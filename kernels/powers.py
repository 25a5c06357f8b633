"""exp(x) as a power of two, which is what GPUs compute: exp2(x log2 e).

Comes in: nothing. Goes out: the factor, for kernels of attention and samples and for what emulates
them. Needs no Triton. Next: library/score_caps.py, hopper/plan/fields.py.
"""

import math

LOG2_E = 1 / math.log(2)
