"""Importing this turns garbage collection off, in the process that programs are forked from.

That process only imports. `forked` turns collection on again in each program.
"""

import gc

gc.disable()
