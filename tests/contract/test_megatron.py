"""Σπ² over tensor parallel ranks through verl's own Megatron head, on two real gloo ranks. See megatron_rank."""

import ast

import pytest
import torch.multiprocessing as mp
from free_port import free_port
from megatron_rank import ENGINE, MODULE, one_rank
from wheels import WHEELS, classes, methods


@pytest.mark.parametrize("root", WHEELS)
def test_over_two_ranks(root):
    mp.spawn(one_rank, args=(2, free_port(), root), nprocs=2)


@pytest.mark.parametrize("root", WHEELS)
def test_the_forward_hands_over_what_the_hooks_need(root):
    """The method is looked up on the instance and given the batch by name, so a hook on the class sees the request."""
    forward_step = methods(classes(root, MODULE)[ENGINE])["forward_step"]
    calls = [node for node in ast.walk(forward_step) if isinstance(node, ast.Call) and node.args]
    call = next(node for node in calls if ast.unparse(node.args[0]) == "self._lm_head_logits_processor")
    assert {"calculate_sum_pi_squared", "batch"} <= {keyword.arg for keyword in call.keywords}


@pytest.mark.parametrize("root", WHEELS)
def test_mindspeed_inherits_the_head(root):
    head = classes(root, "verl.workers.engine.mindspeed.transformer_impl")["MindspeedEngineWithLMHead"]
    assert [ast.unparse(base) for base in head.bases] == [ENGINE]
    assert not {"forward_step", "_lm_head_logits_processor"} & methods(head).keys()
