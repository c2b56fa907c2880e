"""The entry point `otb` of the group `verl.plugins`.

verl imports this module in every process that imports verl and calls nothing in it, so the import itself registers
the hooks. It imports nothing of verl and never raises into it: what goes wrong is logged here and raised where OTB
is used. `VERL_OTB_STRICT=1` ends the process at once instead.
"""

import logging
import os

logger = logging.getLogger("verl_otb")


def _be_heard() -> None:
    """A handler of our own: a library that vLLM imports sets the root logger and its handlers to ERROR. verl's V1
    trainer does the same for its logger; the other trainers and the workers fall silent."""
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))  # verl's
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))


try:
    from verl_otb.integration import patching

    _be_heard()
    patching.install()
except Exception as error:
    if os.environ.get("VERL_OTB_STRICT") == "1":
        raise SystemExit(f"verl-otb could not be loaded: {error!r}") from error
    logger.warning("verl-otb could not be loaded, verl runs as without it: %r", error)
