"""What experiments share. Most need the names that are here; none of them imports JAX."""

from experiments.lib.experiment import grid, run
from experiments.lib.options import Options, engine_option, engine_options, option
from experiments.lib.reporting import print_rows, print_table, report, write_csv, write_results

__all__ = ["grid", "run"]
__all__ += ["Options", "engine_option", "engine_options", "option"]
__all__ += ["print_rows", "print_table", "report", "write_csv", "write_results"]
