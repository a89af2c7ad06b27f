"""A page over all episodes of a run or an evaluation: `python -m rollout.view`.

`index` finds them on disk, `change` compares two folders, `atif` writes a format of other tools.
"""
