"""Hydra groups: 'hydra.searchpath=[pkg://verl_otb.configs]', and then +otb=default, +otb=tir or +otb=fused."""
