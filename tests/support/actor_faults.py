"""Loaded into a run by VERL_USE_EXTERNAL_MODULES: what OTB_FAULT names goes wrong in the actor's process.

OTB_FAULT=kill@2    the last rank's 2nd update ends in SIGKILL, as by the kernel when memory runs out
OTB_FAULT=nan@2     its embedding is NaN from its 2nd old-log-prob pass on, as in a model that has diverged
"""

import functools
import itertools
import os
import signal

import wrapt


def kill(worker) -> None:
    if worker.rank == worker.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def nan(worker) -> None:
    next(worker.actor.engine.module.parameters()).data.fill_(float("nan"))


FAULTS = {"kill": ("update_actor", kill), "nan": ("compute_log_prob", nan)}


def _inject(engine_workers) -> None:
    name, _, when = os.environ["OTB_FAULT"].partition("@")
    method, fault = FAULTS[name]
    stock, calls = getattr(engine_workers.ActorRolloutRefWorker, method), itertools.count(1)

    @functools.wraps(stock)  # with the attributes by which verl dispatches it
    def faulty(self, *args, **kwargs):
        if next(calls) == int(when):
            fault(self)
        return stock(self, *args, **kwargs)

    setattr(engine_workers.ActorRolloutRefWorker, method, faulty)


wrapt.register_post_import_hook(_inject, "verl.workers.engine_workers")
