from __future__ import annotations

import os
import warnings

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise, importing it downloads prices
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from importing LiteLLM
    import litellm  # noqa: F401
