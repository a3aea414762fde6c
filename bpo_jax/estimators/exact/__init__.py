"""Expectations of an estimator as sums over everything that can happen, to check it to rounding.

`mdp` has small decision problems whose gradient is known, `schedulers` the ways to grow a tree on
them. Whoever adds an algorithm finds out here whether it is unbiased, and if not by how much:

    from bpo_jax.estimators.exact import mdp, schedulers

    problem = mdp.random_mdp(0, gamma=1.0)
    scheduler = schedulers.depth_first(2, schedulers.uncertain)
    expected = mdp.expect(problem, scheduler, ALGORITHMS["bpo"].estimate)
    print(mdp.error(expected.gradient, problem.gradient()))
"""
