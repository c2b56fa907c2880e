"""The entry point `otb` of the group `verl.plugins`.

verl imports this module in every process that imports verl and calls nothing in it, so the import itself registers
the hooks. It imports nothing of verl and never raises into it: what goes wrong is logged here and raised where OTB
is used. `VERL_OTB_STRICT=1` ends the process at once instead.
"""

import logging
import os

logger = logging.getLogger("verl_otb")
# Through verl's handlers and levels: other libraries change the root logger's, which is why verl keeps its own.
logger.parent = logging.getLogger("verl")

try:
    from verl_otb.integration import patching

    patching.install()
except Exception as error:
    if os.environ.get("VERL_OTB_STRICT") == "1":
        raise SystemExit(f"verl-otb could not be loaded: {error!r}") from error
    logger.warning("verl-otb could not be loaded, verl runs as without it: %r", error)
