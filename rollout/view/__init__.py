"""A page over all episodes of a run or an evaluation: `python -m rollout.view`.

`index` finds them on disk, `atif` writes them in a format of other tools.
"""
