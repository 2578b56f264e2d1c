"""`ttpu launch`: several processes as one, on this host, over ssh, in SLURM, on TPU pods and in Kubernetes."""
