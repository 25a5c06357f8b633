"""A model that stays loaded on every rank: decode steps, prompts, sampling, requests.

A model's configuration and a RankContext come in; tokens and logits go out. Start at engine.py;
what is decided before any weight is read is made by decode_planner.py and prefill_planner.py, or
was by an earlier process, and lies in decode_plan.py's DecodePlan; a rank's memory and programs are
made in opening.py, and what launchers call by name is in ranks/jobs.py.
"""
