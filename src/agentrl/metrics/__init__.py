"""What a process tells Prometheus: figures with their values, and the port where they are read.

    figure.py     what a figure is, and the families of samples that its values make
    exposure.py   the HTTP server of a process, at `--metrics_port`
    targets.py    the file that names the ports of a run's processes (Prometheus' file_sd)

The figures themselves stand beside what they describe, in `*_figures.py`. This package and those
modules are imported only where `--metrics_port` or `--enable_metrics` is given.
"""
