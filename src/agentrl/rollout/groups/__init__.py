"""From the scored Records of a group to what is trained.

advantages.py     scores to advantages: the estimators
group_rules.py    efficiency, scaling, and which Records are left out
boundary.py       what is checked before a Record is settled, or a row stored
finalise.py       a finished group: advantages, rows, states
row_building.py   a Record and its turns as a row
rescoring.py      a group scored anew
"""
