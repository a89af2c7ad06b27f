"""Scenes: videos of minutes at real pixels, with questions that a pretrained model can learn from.

`python -m paravt_extras.scenes` writes them. `plan` decides what happens in a video, `draw` and
`film` show it, `ask` asks about it, `demonstrate` writes conversations for a cold start, and
`calibrate` computes what an overview shows of it. docs/data.md describes the result.
"""
