"""Film an agent that one of the classic scripts has trained, or watch it in a window.

python tests/examples/film.py ppo runs/…/agent.pt                        # a window
python tests/examples/film.py ppo runs/…/agent.pt --gif cartpole.gif     # needs pillow
"""

import importlib
import math
import sys
from pathlib import Path

import torch
import tyro
from tyro.conf import Positional

sys.path[1:1] = [str(Path(__file__).parents[2]), str(Path.cwd())]  # the scripts; my_module:MyEnv-v0


def main(
    script: Positional[str], agent: Positional[str], env_id: str = "CartPole-v1", gif: str = ""
):
    """Play one greedy episode, at most 1,000 steps of it, and also show its last state."""
    module = importlib.import_module(Path(script).stem)
    mode = "rgb_array" if gif else "human"
    envs = module.make_envs(env_id, 1, render_mode=mode, vectorization_mode="sync")
    player = module.Agent(envs)
    player.load_state_dict(torch.load(agent))
    obs, _ = envs.reset(seed=1)
    frames, done = [], False
    for _ in range(1001):
        if gif:
            frames.append(envs.render()[0].copy())
        if done:
            break
        obs, _, terminated, truncated, _ = envs.step(player.act(obs, greedy=True))
        done = terminated | truncated
    envs.close()
    if gif:
        from PIL import Image

        fps = envs.metadata.get("render_fps", 30)
        k = math.ceil(fps / 50)  # every k-th frame, as viewers slow down frames of less than 20 ms
        first, *others = map(Image.fromarray, [*frames[:-1:k], frames[-1]])
        first.save(gif, save_all=True, append_images=others, duration=1000 * k / fps)


if __name__ == "__main__":
    tyro.cli(main)
