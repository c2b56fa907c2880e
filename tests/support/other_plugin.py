"""Another plugin that wraps what ours wraps, and does no more than count the calls.

Loaded by VERL_USE_EXTERNAL_MODULES, or put in by a test in its own process.
"""

import functools
from collections import Counter

import wrapt

TARGETS = {
    "verl.trainer.ppo.v1.trainer_base": "compute_advantage_for_multi_trajectories",
    "verl.trainer.ppo.ray_trainer": "compute_advantage",
}
calls: Counter[str] = Counter()


def put_in(module):
    """Around whatever stands there. Returns a function that takes it out again if it is still outermost, and else
    leaves it there to pass calls on."""
    name = TARGETS[module.__name__]
    original = getattr(module, name)
    counting = True

    @functools.wraps(original)
    def counted(*args, **kwargs):
        if counting:
            calls[name] += 1
        return original(*args, **kwargs)

    setattr(module, name, counted)

    def take_out():
        nonlocal counting
        counting = False
        if getattr(module, name) is counted:
            setattr(module, name, original)

    return take_out


def register():
    for module in TARGETS:
        wrapt.register_post_import_hook(put_in, module)
