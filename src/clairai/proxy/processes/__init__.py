"""The proxy in several processes: the first accepts, completion processes answer completions.

The first process also answers everything else. Used if more than one completion process is asked
for; decision 0039 has the reasons.
"""
