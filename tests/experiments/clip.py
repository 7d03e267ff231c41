"""Many passes over a rollout: PPO with its clip, without, and with the adaptive KL penalty."""

from classic_parts import train
from harness import PARTLY, Experiment, Panel, grid

import ppo

FORMS = {"clip": {}, "no clip": {"clip_coef": 1e9}, "penalty": {"surrogate": "penalty"}}


def run(form, epochs, seed, steps=60_000):
    """Greedy return at the end, and the largest KL(π_old ‖ π) of a rollout."""
    kl = []

    def record(agent, batch):
        kl.append(ppo.mean_kl(agent, batch))

    flags = FORMS[form] | {"update_epochs": epochs, "total_timesteps": steps, "seed": seed}
    result, _ = train(ppo, record, **flags)
    return {"greedy_return": result["greedy_return"], "kl_max": max(kl)}


EXPERIMENT = Experiment(
    claim="The clip lets PPO use a rollout many times.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, form=list(FORMS), epochs=[1, 4, 10, 20]),
    smoke=grid(1, form=list(FORMS), epochs=[2], steps=[5000]),
    panels=[
        Panel(
            "CartPole's return: worst of 5 seeds (dotted: median)",
            {form: ({"form": form}, "greedy_return") for form in FORMS},
            axes=("passes over each rollout", "greedy return"),
            x="epochs",
            worst=True,
        ),
        Panel(
            "How far a rollout moves the policy, at most",
            {form: ({"form": form}, "kl_max") for form in FORMS},
            axes=("passes over each rollout", "KL(π_old ‖ π), nats"),
            x="epochs",
            log="y",
        ),
    ],
    finding="At a learning rate of 0.003 the five seeds end, after 4, 10 and 20 passes over each "
    "rollout, at {form clip, epochs 4 / greedy_return / range :.0f}, "
    "{form clip, epochs 10 / greedy_return / range :.0f} and "
    "{form clip, epochs 20 / greedy_return / range :.0f} with the clip, at "
    "{form no clip, epochs 4 / greedy_return / range :.0f}, "
    "{form no clip, epochs 10 / greedy_return / range :.0f} and "
    "{form no clip, epochs 20 / greedy_return / range :.0f} without it (p = "
    "{form clip, epochs 4 ~ form no clip, epochs 4 / greedy_return / p :.2f}, "
    "{form clip, epochs 10 ~ form no clip, epochs 10 / greedy_return / p :.3f} and "
    "{form clip, epochs 20 ~ form no clip, epochs 20 / greedy_return / p :.2f}).",
)
