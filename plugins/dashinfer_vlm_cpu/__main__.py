"""`python -m dashinfer_vlm_cpu` compiles the C kernels."""

import sys

from .build import main

sys.exit(main())
