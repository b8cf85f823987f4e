"""The paper's theory as something to compute: the Bayesian strength of the entropy term, and its bounds."""
