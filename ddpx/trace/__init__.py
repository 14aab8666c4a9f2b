"""Read torch.profiler traces and say where the time of each step went.

    read.py       stream a file's events            intervals.py  arithmetic on sets of time
    collect.py    keep what matters of one rank     lanes.py      where it is kept
    rank.py       split its steps, find causes      analyse.py    match ranks, name stragglers, compare runs
    result.py     what all that finds               advise.py     what to change, with numbers
    report.py, draw.py, page.py   text and JSON, PNG, HTML         cli.py   python -m ddpx trace

Standard library only, matplotlib for the PNG; nothing here imports torch, which takes longer than most reports.
"""
