// A device plugin of the test bed's own: tells the kubelet of the machine's NVIDIA cards, and gives a container that asks for
// `nvidia.com/gpu` the device files of one of them, the driver's own, and the folder of the driver's libraries.
//
// usage: card --folder DIR [--driver DIR] [--card FILE ..]
//
//	--folder  the kubelet's, with its socket in it: /var/lib/kubelet/device-plugins
//	--driver  the driver's libraries, mounted at the same place: /usr/local/nvidia if it is there
//	--card    a device file that is a card; /dev/nvidia0 and so on if nothing is said
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource = "nvidia.com/gpu"
	socket   = "kernelfleet-card.sock"
)

type plugin struct {
	api.UnimplementedDevicePluginServer
	cards  []string
	shared []string
	driver string
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// Cards don't come or go here: they are listed once.
func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	devices := make([]*api.Device, 0, len(p.cards))
	for _, card := range p.cards {
		devices = append(devices, &api.Device{ID: filepath.Base(card), Health: api.Healthy})
	}
	if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		given := &api.ContainerAllocateResponse{}
		for _, path := range p.shared {
			given.Devices = append(given.Devices, &api.DeviceSpec{ContainerPath: path, HostPath: path, Permissions: "rw"})
		}
		for _, card := range p.cards {
			for _, id := range container.DevicesIds {
				if id == filepath.Base(card) {
					given.Devices = append(given.Devices, &api.DeviceSpec{ContainerPath: card, HostPath: card, Permissions: "rw"})
				}
			}
		}
		if p.driver != "" {
			given.Mounts = append(given.Mounts, &api.Mount{ContainerPath: p.driver, HostPath: p.driver, ReadOnly: true})
		}
		log.Printf("gave %v", container.DevicesIds)
		response.ContainerResponses = append(response.ContainerResponses, given)
	}
	return response, nil
}

func register(folder string) error {
	connection, err := grpc.NewClient("unix://"+filepath.Join(folder, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version: api.Version, Endpoint: socket, ResourceName: resource, Options: &api.DevicePluginOptions{},
	})
	return err
}

type paths []string

func (p *paths) String() string { return "" }
func (p *paths) Set(path string) error {
	*p = append(*p, path)
	return nil
}

func main() {
	log.SetFlags(log.Ltime)
	var cards paths
	folder := flag.String("folder", "/var/lib/kubelet/device-plugins", "the kubelet's folder of device plugins")
	driver := flag.String("driver", "", "folder of the driver's libraries")
	flag.Var(&cards, "card", "device file of a card")
	flag.Parse()
	own := plugin{driver: *driver, cards: cards}
	if len(own.cards) == 0 {
		found, _ := filepath.Glob("/dev/nvidia[0-9]*")
		number := regexp.MustCompile(`^/dev/nvidia[0-9]+$`)
		for _, path := range found {
			if number.MatchString(path) {
				own.cards = append(own.cards, path)
			}
		}
	}
	if len(own.cards) == 0 {
		log.Fatal("no card: there is no /dev/nvidia0; name a device file with --card")
	}
	for _, path := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} {
		if _, err := os.Stat(path); err == nil {
			own.shared = append(own.shared, path)
		}
	}
	if own.driver == "" {
		if _, err := os.Stat("/usr/local/nvidia"); err == nil {
			own.driver = "/usr/local/nvidia"
		}
	}
	path := filepath.Join(*folder, socket)
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &own)
	go func() {
		for {
			if err := register(*folder); err == nil {
				log.Printf("registered %v as %s", own.cards, resource)
				return
			} else {
				log.Printf("not registered yet: %v", err)
			}
			time.Sleep(time.Second)
		}
	}()
	log.Fatal(server.Serve(listener))
}
