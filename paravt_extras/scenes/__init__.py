"""Scenes: videos of minutes at real pixels, with questions that a pretrained model can learn from.

`python -m paravt_extras.scenes` writes them. `storyboard` decides what happens in a video,
`places`, `sprites` and `film` show it, `ask` asks about it, and `demonstrate` writes conversations
for a cold start. docs/data.md describes the result.
"""
