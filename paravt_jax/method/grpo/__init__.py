"""PARA-GRPO: from rewards of rollouts to a loss, as pure functions on arrays.

    settings    hyperparameters and variants
    batch       the arrays of a batch, and masked means
    advantages  from rewards and KL to an advantage per token
    anchor      the four places where the format reward can act
    loss        the decoupled policy loss, and the whole loss

The loss and its gradient do not depend on padding, on the order of groups and of the rollouts in a
group, or on the split into micro-batches (with `Totals` of the whole batch).
"""
