// What `docker compose config` does: load, interpolate, validate against the specification, resolve, and print.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	options, err := cli.NewProjectOptions(os.Args[1:], cli.WithOsEnv, cli.WithDotEnv, cli.WithName("din"))
	if err == nil {
		project, failed := options.LoadProject(context.Background())
		if err = failed; err == nil {
			var text []byte
			text, err = project.MarshalYAML()
			fmt.Print(string(text))
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
