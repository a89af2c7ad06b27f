"""The phases of a run, one function each, in the order in which `train.run.execute` calls them."""
