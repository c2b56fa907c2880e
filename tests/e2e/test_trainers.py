"""The deprecated trainer, one_step_off, fully_async, and bypass mode: whole runs, and what they trained on."""

import pytest
import torch
from otb_runs import (
    ACTIVE,
    DENSE_REWARD,
    SAVE_POLICY,
    assert_metrics_describe,
    assert_trained_on_the_estimator_s,
    energy_log_probs,
    policy,
    probe,
    probed,
)
from real_trainer import padded
from transformers import AutoModelForCausalLM
from verl_run import OTHER_MAIN

pytestmark = pytest.mark.e2e

DEPRECATED = "trainer.use_v1=False"
TEMPERATURE = 0.6
# Half the squared log-ratio of actor and rollout is 0.9 to 1.4 a token where the rollout samples from its top 20.
KEPT = 1.22
REWARDS = [
    "algorithm.use_kl_in_reward=True",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_rs=token_k2",
    f"algorithm.rollout_correction.rollout_rs_threshold={KEPT}",
    "actor_rollout_ref.actor.optim.lr=2e-4",  # step 2 is not to leave the threshold behind
    # verl reorders the rows, so that both ranks have as many tokens.
    "trainer.n_gpus_per_node=2",
    "trainer.balance_batch=True",
]
BYPASS = ["algorithm.rollout_correction.bypass_mode=True"]
# Rollout on a logical GPU of its own, weights over gloo_checkpoint.py; verl's task runner alone takes 10 logical CPUs.
SEPARATE = [
    OTHER_MAIN,
    "actor_rollout_ref.hybrid_engine=False",
    "+rollout.nnodes=1",
    "+rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=gloo_checkpoint",
    "+ray_kwargs.ray_init.num_cpus=40",
    "+ray_kwargs.ray_init.num_gpus=2",
]
ASYNC_TRAINING = (
    "staleness_threshold:0.1,trigger_parameter_sync_step:2,require_batches:1,partial_rollout:true,"
    "use_trainer_do_validate:false,use_dynamic_resource_scheduling:false,dynamic_schedule_policy:default,"
    "dynamic_schedule_deactivate_ratio:0.3,dynamic_schedule_enable_rebalance:true,concurrent_samples_per_replica:16"
)
FULLY_ASYNC = [
    "+rollout.n=4",
    "+rollout.total_rollout_steps=8",  # prompts, 4 a step
    f"+async_training={{{ASYNC_TRAINING}}}",
    "+data.gen_batch_size=1",
    "data.train_batch_size=0",
]
MAIN, STEPS = "verl.trainer.main_ppo", 2
EXPERIMENTAL = "verl.experimental"
RUNS = {
    "deprecated": (MAIN, [DEPRECATED, *REWARDS, "algorithm.adv_estimator=tir_optimal_token_baseline"]),
    "deprecated, bypass": (MAIN, [DEPRECATED, *BYPASS]),
    "V1, bypass": (MAIN, BYPASS),
    "one_step_off": (f"{EXPERIMENTAL}.one_step_off_policy.main_ppo", SEPARATE),
    "fully_async": (f"{EXPERIMENTAL}.fully_async_policy.fully_async_main", [*SEPARATE, *FULLY_ASYNC]),
    # Its own default.
    "fully_async, bypass": (f"{EXPERIMENTAL}.fully_async_policy.fully_async_main", [*SEPARATE, *FULLY_ASYNC, *BYPASS]),
}


@pytest.fixture(scope="module", params=RUNS)
def trained(request, tiny_task, tmp_path_factory):
    import verl_run

    directory = tmp_path_factory.mktemp("trainers")
    main, overrides = RUNS[request.param]
    run = verl_run.run_verl(
        DENSE_REWARD,
        f"trainer.total_training_steps={STEPS}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        # top_k makes the rollout's log-probs another distribution's than the actor's.
        "actor_rollout_ref.rollout.top_k=20",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        *SAVE_POLICY[0],
        *overrides,
        task=tiny_task,
        directory=directory,
        env={**probed(directory), **SAVE_POLICY[1]},
        main=main,
    )
    return request.param, run


def generated(fields):
    """(rows, tokens), whether the rollout made the token: rejection changes the response mask."""
    if "attention_mask" in fields:
        width = len(fields["responses"][0])
        return torch.stack(fields["attention_mask"])[:, -width:] != 0
    return padded([torch.ones(len(row)) for row in fields["responses"]]) != 0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_advantages_trained_on_are_the_estimator_s(trained, step):
    name, run = trained
    align = "token" if name == "deprecated" else "position"
    fields = probe(run.directory, step)
    assert_trained_on_the_estimator_s(fields, align)
    if name == "deprecated":  # rejection and weights are in it
        mask = padded(fields["response_mask"]) != 0
        assert (generated(fields) & ~mask).any()
        assert padded(fields["rollout_is_weights"])[mask].max() < 0.5


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_energies_are_of_one_policy(trained, tiny_task, step):
    """log π and Σπ² in float64 from the model that is about to be updated; in fully_async from that of the last sync,
    which verl goes back to for its old log-probs (in bypass mode it has none)."""
    name, run = trained
    fields = probe(run.directory, step)
    path = tiny_task.model if name == "fully_async" else policy(run.directory, step)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    masks = generated(fields)
    for row, length in enumerate(masks.sum(-1).tolist()):
        tokens = fields["input_ids"][row]
        if "attention_mask" in fields:  # padded on both sides, by the deprecated trainer
            tokens = tokens[fields["attention_mask"][row].bool()]
        with torch.no_grad():
            log_pi = (model(tokens[None]).logits[0, -length - 1 : -1] / TEMPERATURE).log_softmax(-1)
        own = log_pi.gather(-1, tokens[-length:, None]).squeeze(-1)
        found = padded(fields["sum_pi_squared"])[row][:length].double()
        torch.testing.assert_close(found, log_pi.exp().square().sum(-1), atol=0, rtol=1e-5)
        torch.testing.assert_close(energy_log_probs(fields)[row][:length].double(), own, atol=1e-5, rtol=0)
    if "bypass" in name:  # the loss keeps the rollout's
        rollout = padded(fields["rollout_log_probs"])[masks]
        torch.testing.assert_close(padded(fields["old_log_probs"])[masks], rollout, atol=0, rtol=0)
        assert (rollout - energy_log_probs(fields)[masks]).abs().max() > 0.1


def test_trains_and_says_so(trained):
    name, run = trained
    lines = run.metrics
    if name.startswith("fully_async"):  # one line for the steps between two weight syncs, and lines of other things
        lines = [line for line in lines if "actor/grad_norm" in line]
        assert lines
    else:
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        for step, line in enumerate(lines, start=1):
            assert_metrics_describe(probe(run.directory, step), line)
    for line in lines:
        assert line["actor/grad_norm"] > 0
        assert line["otb/realized_energy/mean"] > 0
        assert line["otb/gradient_power_vs_group_mean"] > 0
        assert line["variance_proxy/proxy2_total_power"] > 0
    assert run.log.count(ACTIVE) == 1
    assert run.log.count("each step has that forward pass after all") == ("bypass" in name)


@pytest.mark.parametrize("name", ["one_step_off", "fully_async"])
def test_a_wrong_configuration_ends_before_ray(run_verl, name):
    """Their drivers do not call validate_config."""
    main, overrides = RUNS[name]
    wrong = "actor_rollout_ref.actor.calculate_sum_pi_squared=False"
    run = run_verl(*overrides, wrong, main=main, expect_success=False)
    assert run.returncode == 1
    assert "Add the override actor_rollout_ref.actor.calculate_sum_pi_squared=True" in run.log
    assert "Started a local Ray instance" not in run.log
