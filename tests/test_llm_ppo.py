"""What PPO alone has of the LLM scripts: a critic, an advantage for each token, KL in the reward of
each token, an entropy bonus. And what only a critic allows: a single completion of each question.
"""

import pytest
import torch
from conftest import calls_of, last_checkpoint, random_model, script, with_critic
from oracles import gae
from test_llm_epochs import LENGTHS, TEXTS, by_length, take_step

ppo = script("ppo_llm")
DECAYS = [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.7, 1.0), (1.0, 0.0), (0.0, 0.5)]
SHORT = [5, 1, 3, 5, 2]


@pytest.mark.parametrize("gamma,gae_lambda", DECAYS)
def test_gae_against_its_definition(gamma, gae_lambda):
    """GAE is a sum over all δ to come, and nothing comes after the last token. The values in the
    padding may not enter any advantage."""
    args = ppo.Args(gamma=gamma, gae_lambda=gae_lambda)
    g = torch.Generator().manual_seed(0)
    mask = (torch.arange(5) < torch.tensor(SHORT)[:, None]).double()
    rewards, values = torch.randn(2, 5, 5, generator=g, dtype=torch.double)
    values[mask == 0] = 1e3
    found = ppo.compute_advantages(rewards * mask, values, mask, args)
    for i, length in enumerate(SHORT):
        expected = gae(rewards[i, :length].tolist(), values[i, :length].tolist(), args)
        assert found[i, :length].tolist() == pytest.approx(expected)
        assert not found[i, length:].any()


def test_what_reaches_the_update(monkeypatch):
    """Each token's reward is −β (log π_old − log π_ref), and the last one's the verifier's, too.
    Advantages are whitened over the whole rollout, equal ones to 0; targets are not."""
    drift = torch.rand(24, 9, generator=torch.Generator().manual_seed(0))

    def batch_logprobs(policy, batch, args):
        return batch["sampled_logprobs"] - drift * batch["mask"] * (policy is None)

    monkeypatch.setattr(ppo, "batch_logprobs", batch_logprobs)
    credit = calls_of(monkeypatch, ppo, "compute_advantages")
    rollouts = calls_of(monkeypatch, ppo, "rollout")
    model = with_critic("ppo_llm", random_model())
    given = (by_length, model, None, torch.optim.SGD(model.parameters(), lr=0.0))
    metrics = take_step("ppo_llm", monkeypatch, *given, beta=0.5, gae_lambda=0.5)
    (((rewards, values, mask, _), advantages),) = credit
    ((_, (batch, *_)),) = rollouts
    for i, length in enumerate(LENGTHS):
        expected = [-0.5 * d for d in drift[i, :length].tolist()]
        expected[-1] += TEXTS[i] % 2
        assert rewards[i, :length].tolist() == pytest.approx(expected, abs=1e-6)
        assert not rewards[i, length:].any()
    assert metrics["kl"] == pytest.approx(drift[mask > 0].mean().item(), rel=1e-4)
    torch.testing.assert_close(batch["targets"], values + advantages)
    torch.testing.assert_close(batch["advantages"], ppo.whiten(advantages, mask))
    of_tokens = batch["advantages"][mask > 0]
    assert abs(of_tokens.mean()) < 1e-6
    assert of_tokens.std(correction=0) == pytest.approx(1, abs=1e-3)
    assert not ppo.whiten(torch.full_like(mask, 0.5), mask).any()
    left = advantages[mask > 0].var() / batch["targets"][mask > 0].var()
    assert metrics["explained_variance"] == pytest.approx(1 - left.item(), abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_critic_is_a_copy_that_says_0(kind):
    """It has weights of its own, also where embeddings are tied to the head, as in GPT-2."""
    model = random_model(kind)
    ppo.add_critic(model)
    batch = ppo.generate(model, [[3, 4], [5]], 2, 6, 1.0)
    assert not ppo.token_values(model, batch).any() and not model.critic.training
    policy = [p for name, p in model.named_parameters() if not name.startswith("critic.")]
    shared = {p.data_ptr() for p in policy} & {p.data_ptr() for p in model.critic.parameters()}
    assert not shared and len(policy) > 5


def test_the_saved_model_is_the_policy_alone(pretrained, short_run, monkeypatch):
    """The critic is in the optimizer and in the checkpoint's state; the reference has none. And a
    group may be of one completion: every metric stays a number, or the run would end."""
    own = {"steps": 1, "minibatches": 1, "learning_rate": 1e-2, "max_new_tokens": 4}
    own |= {"group_size": 1, "prompts_per_step": 16, "micro_batch_size": 3}
    monkeypatch.setattr(ppo, "load_verifier", lambda _: lambda completion, _: 1 + len(completion))
    calls = calls_of(monkeypatch, ppo, "train_step")
    folder = ppo.main(ppo.Args(**short_run | own, model=pretrained))["folder"]
    (((model, reference, _, optimizer, *_), _),) = calls
    assert not hasattr(reference, "critic")
    trained = {p.data_ptr() for p in optimizer.param_groups[0]["params"]}
    assert trained == {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in model.critic.parameters()} < trained
    file = last_checkpoint(folder) / "model.safetensors"
    assert b"critic" not in file.read_bytes()
    critic = torch.load(file.with_name("trainer.pt"), weights_only=True)["critic"]
    assert any(tensor.any() for name, tensor in critic.items() if name.startswith("lm_head"))
