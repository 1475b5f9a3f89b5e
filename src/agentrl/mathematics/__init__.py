r"""Whether two mathematical answers are equal: pure functions of two texts.

    answer_part    the part of a longer text that is its answer
    notation       one canonical notation for Unicode, LaTeX's variants, plain text, numbers
    units          what `cm^2`, `miles per hour` and `18 eggs` measure
    plain_forms    a quick look at ground truths, most of which are simple
    answers        the kinds of answers
    reading        from a text to an answer: lists, tuples, relations, and what the next ones read
    quantities     numbers with units, currencies, percent
    matrices       matrices
    regions        unions of intervals
    structure      brackets
    expressions    values, by SymPy and latex2sympy2_extended
    equality       whether two answers are the same
    worker         the process in which this runs

Nothing here imports other packages of agentrl: the processes of the scorer `math` load only this.
"""
