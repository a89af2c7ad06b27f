"""What helps around the method: plans, checks, reports, studies, other evaluators.

It may import the core; the core never imports it. Only commands wire the two together.
"""
