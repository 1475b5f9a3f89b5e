"""Bring published weights to inference services.

    updates          one interface, and the update of many services around it: pause, load, continue
    disk             the service reads a folder
    distributed      broadcast to the service's ranks in a process group
    tensor           tensors in shared memory, for a service on the same machine
    probes           what a service leaves out, at its first update
    group            the process group of `distributed`, for both sides
    shared_tensors   tensors in shared memory as text, for both sides of `tensor`

The trainer decides what is published, when, and under which version.
"""
