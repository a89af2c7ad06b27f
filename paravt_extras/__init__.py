"""What helps around the method: plans, checks, reports, scenes.

It may import the core; the core never imports it. Only commands wire the two together.
"""
