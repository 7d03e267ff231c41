"""The arithmetic of the experiments and benchmarks, on inputs whose answer is known."""

import random
from types import SimpleNamespace

import bootstrap
import classic
import classic_parts
import gymnasium as gym
import length
import psi
import pytest
import ratio
import torch
from conftest import script

grpo, actor_critic = script("grpo_llm"), script("actor_critic")


def test_the_square_of_a_mean_is_unbiased():
    """A mean of products of two independent rows: here of three pairs of rows."""
    found = psi.square_of_mean(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]]))
    products = [1 * 3 + 2 * 4, 1 * 5 + 2 * 7, 3 * 5 + 4 * 7]
    assert found == pytest.approx(sum(products) / 3)


def test_monte_carlo_sums_the_rewards_to_the_episode_s_or_the_rollout_s_end():
    """Two environments, three steps, γ = 0.5; the first episode of the second ends after one."""
    rollout = {"rewards": torch.tensor([[1.0, 5.0], [2.0, 6.0], [4.0, 8.0]])}
    rollout["done"] = rollout["terminated"] = torch.tensor([[0, 1], [0, 0], [0, 0]]).bool()
    values, next_values = torch.full((3, 2), 10.0), torch.full((3, 2), 16.0)
    args = actor_critic.Args(gamma=0.5)
    advantages, targets = bootstrap.monte_carlo(rollout, values, next_values, args)
    returns = torch.tensor([[1 + 1 + 1 + 2, 5], [2 + 2 + 4, 6 + 4 + 4], [4 + 8, 8 + 8]])
    # V(s_{t+1}) = 16 and V(s_t) = 10 disagree, and GAE telescopes over both: γ 16 − γ 10 each.
    returns = returns + torch.tensor([[3.0 + 1.5, 0], [3, 3], [0, 0]])
    assert torch.allclose(advantages, returns - 10)
    assert torch.allclose(targets, rollout["rewards"] + 8 * ~rollout["done"])


def test_plus_signs_are_those_of_samples(monkeypatch):
    """A model without memory that says + with the probability p says on average 1 / (1 − p), once
    it has begun with one."""
    model, tokenizer = grpo.load_policy(grpo.Args(), torch.device("cpu"))
    plus = tokenizer.convert_tokens_to_ids("+")
    p = 0.75

    def token_logprobs(model, batch, temperature):
        assert (batch["completion_ids"] == plus).all() and temperature == 1
        return torch.full(batch["mask"].shape, p).log()

    monkeypatch.setattr(grpo, "token_logprobs", token_logprobs)
    assert length.plus_signs(model, tokenizer) == pytest.approx(1 / (1 - p), rel=1e-4)


def test_signals_and_cosines_of_known_gradients(monkeypatch):
    """Groups whose gradients are all g have a signal of 1; g and −g in turn have none; and half of
    the gradient's square per rollout of 32 where the noise of four groups is 8 times its square.
    The cosine with fresh gradients is that of the two means, and is smaller by the noise."""
    weight = torch.nn.Parameter(torch.zeros(2))
    model = SimpleNamespace(parameters=lambda: [weight])
    monkeypatch.setattr(grpo, "token_weights", lambda mask, args: mask)
    monkeypatch.setattr(
        grpo, "token_logprobs", lambda model, group, temperature: group["g"] @ weight[:, None]
    )

    def fours(gradients):
        rows = torch.tensor(gradients).repeat_interleave(4, 0)  # four groups share a gradient
        batch = {name: torch.ones(len(rows), 1) for name in ("mask", "old_logprobs", "advantages")}
        return batch | {"g": rows}

    def signal(gradients, fresh=((3.0, 4.0),) * 8):
        args = grpo.Args()
        args.group_size = 1
        found = ratio.signals(model, fours(gradients), fours(fresh), args)
        return found["signal, weight 1"], found["cosine, weight 1"]

    assert signal([[3.0, 4.0]] * 8) == pytest.approx((1, 1))
    assert signal([[4.0, -3.0]] * 8) == pytest.approx((1, 0), abs=1e-6)
    assert signal([[1.0, 2.0], [-1.0, -2.0]] * 500)[0] == pytest.approx(0, abs=0.1)
    noisy = [[1.0 + s * 8**0.5, 0.0] for s in (1, -1)] * 500
    assert signal(noisy) == pytest.approx((0.5, 0.6 * 0.5**0.5), abs=0.02)


@pytest.mark.parametrize("place", ["seen, 0.5", "hidden"])
def test_a_corridor_pays_the_right_door_alone(place):
    """Right door 1, wrong door 0, but for the noise; later actions change nothing."""
    env, dice = gym.make(classic_parts.PLACES[place]), random.Random(0)
    env.unwrapped.noise = 0.0
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        cue, right = int(obs[22]), bool(dice.getrandbits(1))
        total, end, action = 0.0, False, cue if right else 1 - cue
        while not end:
            _, reward, end, _, _ = env.step(action)
            total, action = total + reward, dice.randrange(2)
        assert total == right


def test_a_learning_curve_is_of_the_returns_told():
    """The mean return of the episodes told in each of its parts; where none ended, the part before
    counts. A rollout belongs to the part in which its last step lies."""
    told = [[], [4.0, 6.0], [], [10.0]] * 10

    def rollouts(envs, agent, args):
        for returns in told:
            yield {"mask": torch.ones(args.total_timesteps // 40).bool()}, returns

    def main(args):
        for _ in stub.rollouts(None, None, args):
            pass
        return {"eval/return": 7.0}

    stub = SimpleNamespace(Args=actor_critic.Args, rollouts=rollouts, update=None, main=main)
    run = classic_parts.train(stub, total_timesteps=400)
    assert run.greedy_return == 7.0 and run.curve[:6] == [0.0, 0.0, 5.0, 5.0, 10.0, 10.0]


def test_watch_counts_both_sides_alike():
    """Solved is a mean of 475 over the last 100 episodes; what comes later changes nothing."""
    watch = classic.Watch()
    watch.start(0.0)
    assert not watch.note(100, [500.0] * 99)
    assert watch.note(10, [500.0]) and watch.found["solved_step"] == 110
    assert not watch.note(10, [0.0] * 6) and watch.found["solved_step"] == 110
    assert watch.found["steps"] == 120
