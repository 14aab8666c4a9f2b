"""Read torch.profiler traces and say where the time of each step went.

    read.py       stream a file's events            collect.py   keep what matters of one rank
    intervals.py  arithmetic on sets of time        analyse.py   split steps, find causes, match ranks, compare runs
    advise.py     what to change, with numbers      report.py, draw.py, page.py   text and JSON, PNG, HTML
    cli.py        python -m ddpx trace

Standard library only, matplotlib for the PNG; nothing here imports torch, which takes longer than most reports.
"""
