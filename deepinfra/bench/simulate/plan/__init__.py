"""Plans fleets of thousands of devices from first figures, and gives the simulator what steps cost on one of them.

What a plan is made of is in `devices`, `models`, `traffic` and `roofline`; each figure there says where it comes from.
What others published about fleets that run is in `published`, which only `compare` reads: no prediction may use it.
"""
