"""The sampler: requests in, sampled tokens and their log-probs out.

Reading order:

1. `requests`: what an agent asks for, what it gets back, and how many agents wait side by side.
2. `pages`: which page of the KV cache holds which tokens.
3. `sequences`: the state of one sample. `engine` uses its fields on every line.
4. `engine`: the schedule. `submit` and `step` are the way in.
5. `layout`: which row of a decoding call runs which sequence.
6. `runner` and `programs`: the arrays of a step, and the jitted functions that take them.
7. `sampling`: one token from a row of logits. `drafts`: guesses of the next ones.
8. `pacing`: agents that stop at a point of virtual time and go on later.

`settings` has the sizes of all of these, and derives them from the lengths of a run.
"""
