"""What `deepinfra bench` measures with: machine, recorder, offline runs, a peer, load on a server."""
