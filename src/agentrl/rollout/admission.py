"""How far samplers may run ahead of the trainer: the bound on staleness, as a formula."""


def admitted_groups(
    *, max_staleness: int, rows_per_step: int, group_size: int, waiting: int, open_groups: int
) -> int:
    """How many further groups of attempts may begin now.

    A group begun now is trained once all accepted before it are. With every step training
    `rows_per_step` rows, the policy is then at most `max_staleness` versions newer, if

        accepted + running < (max_staleness + version + 1) * rows_per_step

    where `accepted` counts all rows ever made, trained ones included (AReaL, arXiv 2505.24298,
    section 5.1). The first `version * rows_per_step` of those are trained; so with `waiting`, the
    rows made and not trained yet, the same bound reads

        waiting + running < (max_staleness + 1) * rows_per_step

    and holds across restarts too. `running` are all attempts of open groups, begun or not: a group
    once begun must always be able to end, or the bound could be full of groups that wait for it.
    """
    running = open_groups * group_size
    room = (max_staleness + 1) * rows_per_step - waiting - running
    return max(0, -(-room // group_size))
