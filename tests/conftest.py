"""Fixtures of the tests that run verl, in this process or as a whole."""

import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# verl takes its platform from here when it is first imported, by whichever test.
os.environ.setdefault("VERL_PLATFORM", "cpu")

import verl_run


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> verl_run.TinyTask:
    """The tiny model, tokenizer and data, made once."""
    return verl_run.TinyTask.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run_verl(tiny_task: verl_run.TinyTask, tmp_path: Path) -> Callable[..., verl_run.VerlRun]:
    """`verl_run.run_verl` on the tiny task, in this test's own directory unless `directory` says otherwise."""
    return functools.partial(verl_run.run_verl, task=tiny_task, directory=tmp_path)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's, on the plugin's logger as well: that one does not pass its records on to the root logger."""
    logger = logging.getLogger("verl_otb")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
